"""The harness: train self-supervised methods under the same conditions, evaluate them alike, report with spread."""
