"""Several servers behind one address: `dovetail serve --data-parallel-size N` and `dovetail gateway`.

A *worker* is a `dovetail serve` of its own. This process takes the clients' connections, checks keys and bounds as
every server does, and relays. Which worker gets a prompt is decided by smg (the package `smg`, extra `gateway`), which
remembers who has seen which prefix; everything else is ours:

- `division` is what a worker is started with, `child` its process, `relayed_log` its lines in the one log
- `fleet` knows which workers are ready, `worker_health` asks them
- `placement` runs smg and asks it, with what `prompts` finds in a body
- `relay` forwards a request and its reply; `streams` moves a stream to another worker, with what is `kept` of it
- `fan_out` and `figures` are routes that concern every worker
- `app` and `run` put it together
"""
