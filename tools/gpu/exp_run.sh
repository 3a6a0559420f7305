#!/bin/bash
export PYTHONPATH=$PWD
timeout 150 python3 tools/gpu/exp_sweep.py --json $OUT/sweep.json > $OUT/sweep.log 2> $OUT/sweep.err
timeout 60 python3 tools/gpu/experts_few.py --json $OUT/few.json > $OUT/few.log 2>&1
timeout 60 ncu --clock-control none -k regex:"gate_up|down" --section SpeedOfLight \
  --section MemoryWorkloadAnalysis --section SchedulerStats --section WarpStateStats \
  --section Occupancy --section ComputeWorkloadAnalysis --section InstructionStats \
  --metrics sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active,sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active,smsp__issue_active.avg.pct_of_peak_sustained_active \
  python3 tools/gpu/exp_sweep.py --one 64 > $OUT/ncu.log 2>&1
tail -3 $OUT/sweep.err; grep -E "Throughput|Duration|Registers|No Eligible|gate_up|down_" $OUT/ncu.log | head -60
grep -E "^few|^layer" $OUT/few.log; cat $OUT/sweep.log
