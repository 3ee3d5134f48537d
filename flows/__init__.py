"""The order of the steps, as Prefect flows, and the command `epsilonflow`."""
