"""What a model is: its sizes, its family, its number formats and how it is split over devices."""
