"""Decides whether the first waiting request starts, while others run.

``Starter`` starts a request if none of the other modules holds it back:

* ``light_keys`` may let the request of an API key with few requests go first.
* ``batching`` has the batching modes, for example static batching.
* ``controls`` has the admission controls, which leave enough blocks free for the running requests to grow.
* ``slo_starts`` limits how many requests start in a step under policy ``slo``.

The package ``waiting`` decides earlier which requests may wait, and in which order.
"""
