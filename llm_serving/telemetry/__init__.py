"""Reports of the server about itself: event log, metrics, status, statistics, receipts and start-up progress."""
