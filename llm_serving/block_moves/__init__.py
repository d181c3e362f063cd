"""Copies blocks between the device and host memory, in steps that only copy blocks (MOVE steps).

* ``swapping`` copies the blocks of preempted sequences to the host pool and back.
* ``hand_overs`` copies computed prompts to the hand-over pool, from which another replica takes them.
* ``tier_moves`` copies cached blocks to the KV tiers and back. These blocks belong to no sequence.

``swapping`` and ``hand_overs`` move the blocks of sequences, and have the base class ``BlockMover``. The scheduler
creates only the objects that the settings need.
"""
