"""Replicas on the machines of a Ray cluster. Needs the extra [ray].

`deploy.py` has what `serve run simplellm.server.cluster.deploy:app` takes. A request
comes to the proxy of Ray Serve on any node, which gives it to the `Ingress` of
`ingress.py`. That reads the body and sends it on, with what is known of its prefixes,
to one of the replicas in `engine.py`, each a whole server around an engine;
`router.py` says to which. `shared_state.py` has what all of them know: which replica
has computed which prefixes, and the stored responses. Ray Serve starts, watches,
replaces, drains and scales all of these.

What crosses between them is numbers, texts and the bytes of HTTP.
"""
