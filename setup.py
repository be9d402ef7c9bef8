from setuptools import setup

setup(
    cffi_modules=["ceedtap/native/build.py:builder"],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
