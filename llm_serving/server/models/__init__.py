"""Serves several models over HTTP: finds the model of a request, and handles the commands that load and end models."""
