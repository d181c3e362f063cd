"""Facts about a model: sizes, family, number formats, and its parts on several devices."""
