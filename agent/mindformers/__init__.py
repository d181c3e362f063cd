"""Runs the inference models of MindFormers (the extra ``[mindformers]``) instead of ours; see docs/mindformers.md."""
