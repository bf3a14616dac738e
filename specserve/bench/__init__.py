"""Measurements inside one process, without HTTP: where a step's time goes (`step`)."""
