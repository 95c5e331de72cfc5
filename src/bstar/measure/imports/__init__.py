"""Results that other load generators wrote, read as runs: vLLM's, GuideLLM, AIPerf, inference-perf."""

from bstar.measure.imports.detect import is_foreign_result, read_results
from bstar.measure.imports.run import ImportedRun

__all__ = ["ImportedRun", "is_foreign_result", "read_results"]
