"""`dovetail bench`: how fast a server or the engine is, beside what the device's memory would allow.

| module | what |
|---|---|
| `workloads` | what is sent: the named workloads and the lengths of requests |
| `prompts` | the prompts themselves: random ids, text, or a file |
| `wire` | the three endpoints: bodies, and what an event or a reply says |
| `stream` | counts the tokens of a stream while it comes, without decoding every event |
| `worker`, `drive` | client processes, and the process that starts them and gathers what they saw |
| `target`, `launch` | what server is measured; starting our own |
| `floor`, `bandwidth` | the least time a step can take |
| `figures`, `report` | percentiles, tables, JSON |
| `serve`, `offline` | the commands, from checked options to the printed table |
"""
