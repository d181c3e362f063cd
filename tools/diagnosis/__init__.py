"""What ``tools/doctor.py`` does: checks of the machine against a config, and error codes and logs in plain words."""
