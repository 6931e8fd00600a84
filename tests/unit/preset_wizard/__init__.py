"""Tests of `preset_wizard/`."""
