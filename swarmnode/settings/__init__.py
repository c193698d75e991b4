"""Settings: their record, where each comes from, and the page that explains them."""
