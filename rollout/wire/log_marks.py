"""Parts of the log lines that both engines write around the load of their weights; SGLang 0.5.23's words."""

LOADS, LOADED = "Load weight begin", "Load weight end"
