"""Facts as data files, each with its source and date: devices, models, engines; and their loaders."""
