"""PyTorch's own test files, run on the device "flambeau" and with this backend, beside the CPU and the stock backends.

    make test-torch PYTORCH_TESTS=/path/to/pytorch/test
    PYTHONPATH=tests python -m torch_suite /path/to/pytorch/test [file-part ...] [--help]

files.py names the files and what stands beside each; a worker (worker.py) loads one file, prepared by prepare.py, and
runs its tests one by one; runner.py starts workers, ends those that hang, and keeps what they report, so that a run can
be resumed; reasons.py explains failures; report.py writes results/torch-tests.json and the table in
docs/guides/device.md.

None of PyTorch's tests are in this repository. The folder should be that of the installed version of torch. Needed
beside the test tools of this project: nothing for most files; what a file imports and is not there is in its result.
"""
