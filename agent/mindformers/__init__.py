"""The inference models of MindFormers (the extra ``[mindformers]``), run as our own are; docs/mindformers.md."""
