"""Runs the inference models of MindFormers (the extra ``[mindformers]``) in place of ours; see docs/mindformers.md."""
