"""Time the whole model through scheduler and graph runner, and profile a step.

    python tools/gpu/decode.py --model gpt-oss-120b --batch 1,8,64 --json OUT
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from simplellm.graphs import GraphRunner  # noqa: E402
from simplellm.kernels.forward import FUSED, Fused  # noqa: E402
from simplellm.model import load_model  # noqa: E402
from simplellm.paged import PagedCache  # noqa: E402
from simplellm.sampler import Columns, SamplingParams  # noqa: E402
from simplellm.scheduler import Job, Scheduler  # noqa: E402

GREEDY = SamplingParams(temperature=0)


class Loop:
    def __init__(self, runner, batched, seqs):
        self.runner, self.cache = runner, runner.cache
        self.batched, self.seqs = batched, seqs

    def run(self, jobs, stop_after=None):
        """Run jobs to their end; (end of step, tokens given) of each step."""
        scheduler = Scheduler(
            self.cache.manager,
            max_num_seqs=self.seqs,
            max_num_batched_tokens=self.batched,
            prefill_chunk=self.batched,
        )
        scheduler.add(jobs)
        flights, times = [], []
        columns = {}
        while scheduler.jobs:
            works = sorted(scheduler.schedule(), key=lambda w: w.length > 1)
            if works:
                count = sum(w.samples for w in works)
                if count not in columns:
                    columns[count] = Columns.of(
                        [GREEDY] * count, self.runner.fused.model.config.vocab_size, "cuda"
                    )
                flights.append((works, self.runner.launch(works, columns[count], [])))
                scheduler.begin(works)
            if len(flights) > 1 or not works:
                done, flight = flights.pop(0)
                tokens = flight.wait().tokens.tolist()
                scheduler.commit(done, tokens)
                times.append((time.perf_counter(), len(tokens), sum(w.length for w in done)))
        return times


def prompts(count, length, vocab, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab, (count, length), generator=generator).tolist()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="gpt-oss-120b")
    parser.add_argument("--batch", default="1,2,4,8,16,32,64,128,256")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--prefill", default="1x2048,32x2048")
    parser.add_argument("--batched", type=int, default=8192)
    parser.add_argument("--profile", default="1,64")
    parser.add_argument("--profile-prefill", action="store_true")
    parser.add_argument("--json")
    args = parser.parse_args()
    batches = [int(b) for b in args.batch.split(",")]
    result = {"model": args.model, "gpu": torch.cuda.get_device_name(), "decode": [], "prefill": []}

    t = time.perf_counter()
    model = load_model(args.model, random_weights=True, device="cuda", backend=FUSED)
    torch.cuda.synchronize()
    result["load_s"] = time.perf_counter() - t
    print(f"loaded in {result['load_s']:.1f} s, {torch.cuda.memory_allocated() / 2**30:.1f} GiB", flush=True)
    seqs = max(batches)
    cache = PagedCache(model.config, max_bytes=16 * 2**30, page_size=64, dtype=model.dtype,
                       device="cuda", share=False, max_chunk=args.batched)
    fused = Fused(model, cache, max_num_seqs=seqs)
    t = time.perf_counter()
    longest = max(args.input_len + args.output_len, 2048 + 64) + 64
    runner = GraphRunner(fused, max_num_seqs=seqs, max_num_batched_tokens=args.batched,
                         max_model_len=longest, capture=False)
    runner.sizes = [b for b in runner_sizes(batches)]
    runner.capture()
    torch.cuda.synchronize()
    result["capture_s"] = time.perf_counter() - t
    print(f"captured {runner.sizes} in {result['capture_s']:.1f} s", flush=True)
    loop = Loop(runner, args.batched, seqs)
    vocab = model.config.vocab_size

    for batch in batches:
        for out in (8, args.output_len):
            jobs = [Job(p, out) for p in prompts(batch, args.input_len, vocab, batch + out)]
            begin = time.perf_counter()
            times = loop.run(jobs)
            end = time.perf_counter()
        full = [b[0] - a[0] for a, b in zip(times, times[1:]) if b[1] == batch == b[2]]
        step = sorted(full)[len(full) // 2]
        same = len({tuple(j.tokens) for j in jobs})
        row = dict(batch=batch, step_ms=step * 1e3, tok_s=batch / step,
                   end_to_end=batch * args.output_len / (end - begin), distinct=same)
        result["decode"].append(row)
        print(f"batch {batch:4d}  step {row['step_ms']:8.3f} ms  {row['tok_s']:9.1f} tok/s"
              f"  end to end {row['end_to_end']:9.1f}", flush=True)
    for spec in filter(None, args.prefill.split(",")):
        count, length = map(int, spec.split("x"))
        best = 1e9
        for attempt in range(3):
            jobs = [Job(p, 1) for p in prompts(count, length, vocab, attempt)]
            torch.cuda.synchronize()
            begin = time.perf_counter()
            loop.run(jobs)
            best = min(best, time.perf_counter() - begin)
        row = dict(prompts=spec, ms=best * 1e3, tok_s=count * length / best)
        result["prefill"].append(row)
        print(f"prefill {spec:>8}  {row['ms']:8.1f} ms  {row['tok_s']:9.1f} tok/s", flush=True)
    result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    print(f"peak {result['peak_gib']:.1f} GiB")
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1))

    shapes = [(int(b), args.input_len, 12) for b in filter(None, args.profile.split(","))]
    shapes += [(8, 2048, 1)] * args.profile_prefill
    for batch, length, out in shapes:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as prof:
            jobs = [Job(p, out) for p in prompts(batch, length, vocab, 99)]
            loop.run(jobs)
            torch.cuda.synchronize()
        rows = sorted(prof.key_averages(), key=lambda e: -e.self_device_time_total)[:16]
        print(f"profile, batch {batch}")
        for e in rows:
            print(f"{e.key[:50]:50} {e.count:6d} {e.self_device_time_total / max(1, e.count):8.2f} us {e.self_device_time_total / 1e3:8.2f} ms")


def runner_sizes(batches):
    return sorted(set(batches))


if __name__ == "__main__":
    main()
