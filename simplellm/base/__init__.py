"""What everything else is made of: configs, requests and a few tools.

`config.py` has what a model is made of and how an engine runs it, with the checks that
all of the package uses. `sampling_params.py` is what a request may ask for,
`request_spec.py` a checked call, `request.py` each of its samples and the events that
tell of it, `event_queue.py` what these leave through, `sample_position.py` where else a
step samples for it, `grammar.py` what its text must follow. `files.py` is how all read
a checkpoint's small files and map its large ones. `noise.py` has random numbers as a
function, `replica_choice.py` says which of several engines or ranks gets a prompt,
`host_memory.py` has the host's memory, evicted pages among it, and brings numbers to
the device and back.
"""
