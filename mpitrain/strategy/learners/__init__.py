"""Learners that train apart and meet in a shared folder; see ``learner`` for the protocol. Nothing here uses MPI."""
