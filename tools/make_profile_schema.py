"""Writes docs/profile.schema.json, the JSON schema of profile files: run it after a change of the profile."""

from __future__ import annotations

import json
from pathlib import Path

from bstar.calibration.profile import profile_schema

if __name__ == "__main__":
    target = Path(__file__).parents[1] / "docs" / "profile.schema.json"
    target.write_text(json.dumps(profile_schema(), indent=2) + "\n", encoding="utf-8")
