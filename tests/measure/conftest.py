"""Marks and helpers of the client's tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

pytest.importorskip("httptools")
pytest.importorskip("pyarrow")
