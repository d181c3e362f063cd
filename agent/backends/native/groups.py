"""Names of communication groups, which primitives and whoever makes the groups agree on."""

STAGE_GROUP = "stage"
"""The agents that have parts of the same layers. On a CPU there is no other."""
