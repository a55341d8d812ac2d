"""Looking without a job: groups, links and collectives that a mirror shows."""
