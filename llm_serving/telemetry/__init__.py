"""What the server reports about itself: event log, metrics, statistics, timing receipts and start-up progress."""
