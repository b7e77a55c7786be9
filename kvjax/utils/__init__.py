"""Files, processes, settings and compiled programs: helpers that know nothing of models or caches."""
