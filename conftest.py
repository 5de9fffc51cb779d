"""One thread for every test and every process it starts: the models are tiny, and threads that wait for one another on
a busy machine make a run of half a minute one of ten."""
import os

os.environ["OMP_NUM_THREADS"] = "1"              # before torch is imported
