"""A package that is imported part by part is the same package for all who import it."""

import subprocess
import sys

SETTING = "import sys; import algorithms; import dp_accounting.dp_event as events\n"


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", SETTING + code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_module_is_imported_without_the_others() -> None:
    names = {"scipy.stats", "scipy.optimize", "dp_accounting.pld", "dp_accounting.mechanism_calibration"}
    assert run(f"print({names!r} & set(sys.modules))") == "set()\n"


def test_all_of_the_package_is_there_for_others() -> None:
    assert (
        run("""
import dp_accounting as dp, inspect, pickle
from dp_accounting import pld, calibrate_dp_mechanism
assert dp.GaussianDpEvent is events.GaussianDpEvent and dp.pld is pld is sys.modules["dp_accounting.pld"]
assert pickle.loads(pickle.dumps(events.GaussianDpEvent(2.0))) == dp.GaussianDpEvent(2.0)
assert dp.__doc__ and inspect.getsource(dp) and inspect.getmodule(dp.PrivacyAccountant).__package__ == "dp_accounting"
try: dp.nothing
except AttributeError as error: print(error)
""")
        == "module 'dp_accounting' has no attribute 'nothing'\n"
    )


def test_a_package_that_is_there_whole_or_missing_is_left_alone() -> None:
    assert (
        run("""
from algorithms.lazy_imports import import_part_by_part
import json
import_part_by_part("json"), import_part_by_part("no_such_package"), import_part_by_part("this")
print(type(json), "no_such_package" in sys.modules, "this" in sys.modules)
""")
        == "<class 'module'> False False\n"
    )


def test_scipy_is_imported_without_what_compiles_fortran() -> None:
    assert (
        run("""
import numpy, scipy.special, scipy.optimize
print("numpy.f2py" in sys.modules)
from scipy._lib.array_api_compat import numpy as compatible
print(hasattr(compatible, "__file__"), "numpy.f2py" in sys.modules)
print(scipy.special.logsumexp(numpy.zeros(4)) == numpy.log(4), compatible.linalg.norm(numpy.ones(4)))
import scipy._lib.array_api_compat.numpy as whole
print(whole is sys.modules[whole.__name__], whole is compatible, whole.astype is compatible.astype)
""")
        == "False\nFalse False\nTrue 2.0\nTrue False True\n"
    )


def test_methods_and_training_are_imported_without_scipys_optimisation() -> None:
    code = "import algorithms.methods, algorithms.core.training, algorithms.privacy.accounting.risk"
    assert run(f"{code}\nprint('scipy.optimize' in sys.modules)") == "False\n"
