"""When something happens, and on whom: optimiser steps, what waits for them, and ranks. Knows torch alone."""
