"""Chat formats by model: harmony, or whatever a checkpoint's own template says.

`dialect.py` is the record that all of them fill. `encoder.py` reads a tokenizer.json,
which `tekken.py` makes of Mistral's file, and `template.py` a chat template, which
`sandbox.py` runs. `call_forms.py` says how a model writes calls, `tags.py` reads them
as they come, and `whole_calls.py` all at once those whose name or end comes too late
for that.
"""
