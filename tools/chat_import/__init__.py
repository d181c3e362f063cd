"""Makes a deployment config from the ``configuration.json`` of an older ``/chat`` server."""
