"""Implements the doctor, which checks whether a machine can serve a config, and explains error codes and logs."""
