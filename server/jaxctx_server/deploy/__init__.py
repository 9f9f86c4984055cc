"""Deployments of a router with many engines: on a Ray cluster (`ray/`), and on Kubernetes (`kubernetes.yaml`)."""
