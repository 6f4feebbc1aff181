"""Dovetail under Ray (extra `ray`): `dovetail.ray.deployment` for Ray Serve, and `dovetail run-batch --ray`.

Ray places, scales, restarts and routes; a replica is a server with its own engine, less the address:

- `options` is what a user may say of a model, checked with the cluster before anything starts
- `replica` runs the server's application inside a Ray actor, `call` is a request and a reply on their way there
- `router` is Ray's prefix-aware policy, `scaling` its autoscaling by the tokens of prompts that are held
- `front` is the address: the layers of every server, the model's choice, and a stream's move to another replica
- `application` puts them together; `llm_server` is an engine of `ray.serve.llm`, Ray's own application, and `ingress`
  its front
- `batch` answers the lines of files on actors, `batch_files` keeps their results
"""
