"""Measurements against predictions: measured points, their replay, error figures, profiles and ranges."""
