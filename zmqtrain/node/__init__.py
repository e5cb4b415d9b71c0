"""A node alive: what it decides, its threads, its lines to one hub or to several brokers."""
