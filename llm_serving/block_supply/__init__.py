"""Gives a starting sequence its blocks.

``setup`` chooses one of these classes:

* ``BlockSupply`` gives empty blocks on demand. It is the base class of the others.
* ``PrefixSupply``, the default, also shares the blocks of a cached prefix.
* ``TierSupply`` also uses blocks that were loaded from KV tiers.
* ``StateSupply`` is for models with linear attention: a sequence also needs a saved state to use cached blocks.
* ``ContiguousSupply`` gives a sequence one range of blocks for its longest output.
"""
