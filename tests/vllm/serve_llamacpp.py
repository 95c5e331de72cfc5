"""llama.cpp's own HTTP server as the wheel xllamacpp brings it (run inside an environment that has it).

VENV/bin/python serve_llamacpp.py MODEL.gguf PORT SLOTS CONTEXT        CONTEXT is shared by the slots
"""

import sys
import threading

import xllamacpp  # type: ignore[import-not-found]

settings = xllamacpp.CommonParams()
settings.model.path = sys.argv[1]
settings.hostnames = ["127.0.0.1"]
settings.port, settings.n_parallel, settings.n_ctx = (int(word) for word in sys.argv[2:5])
settings.endpoint_metrics, settings.warmup = True, False
settings.cpuparams.n_threads = 1
server = xllamacpp.Server(settings)
print(server.listening_address, flush=True)
threading.Event().wait()
