"""Equipoise: the control plane that keeps Mixture-of-Experts fleets balanced."""
