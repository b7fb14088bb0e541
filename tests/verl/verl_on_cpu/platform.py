"""A platform whose accelerator is the CPU."""

import types
from contextlib import nullcontext

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


class _DeviceModule(types.ModuleType):
    """`torch.cpu`, and a function that returns 0 in place of what it lacks."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.cpu, name, lambda *args, **kwargs: 0)


_module = _DeviceModule("cpu_device_module")
_module.is_available = lambda: True
_module.get_device_name = lambda *args: "CPU"
_module.get_rng_state = lambda *args: torch.get_rng_state()
_module.set_rng_state = lambda state, *args: torch.set_rng_state(state)
_module.mem_get_info = lambda *args: (1 << 33, 1 << 34)


@PlatformRegistry.register(platform="cpu")
class CPUPlatform(PlatformBase):
    device_name = property(lambda self: "cpu")
    vendor_name = property(lambda self: "cpu")
    device_module = property(lambda self: _module)

    def is_available(self):
        return True

    def is_platform_available(self, use_smi_check=False):
        return False  # chosen by VERL_PLATFORM=cpu alone

    def current_device(self):
        return "cpu"

    def device_count(self):
        return 1

    def set_device(self, index):
        pass

    def synchronize(self, index=None):
        pass

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    def manual_seed_all(self, seed):
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings):
        pass

    def empty_cache(self):
        pass

    def get_device_capability(self, index=0):
        return (None, None)

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, message):
        return nullcontext()

    def profiler_start(self):
        pass

    def profiler_stop(self):
        pass

    def ray_resource_name(self):
        return "GPU"  # a logical one: ray.init(num_gpus=...)

    def ray_noset_envvars(self):
        return []

    def is_ipc_supported(self):
        return False

    def cudart(self):
        return None
