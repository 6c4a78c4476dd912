// Vulkan's C++ header, and what ggml's Vulkan backend uses of VK_EXT_layer_settings where that header is too old to have
// it, as Debian 12's is. Used only to switch on a validation layer.
#pragma once

#include_next <vulkan/vulkan.hpp>

#ifndef VK_EXT_layer_settings

#include <vector>

namespace vk {

enum class LayerSettingTypeEXT : uint32_t { eBool32 = 0 };

struct LayerSettingEXT {
    const char * pLayerName;
    const char * pSettingName;
    LayerSettingTypeEXT type;
    uint32_t valueCount;
    const void * pValues;
};

struct LayerSettingsCreateInfoEXT {
    explicit LayerSettingsCreateInfoEXT(const std::vector<LayerSettingEXT> & settings)
        : settingCount((uint32_t)settings.size()),
          pSettings(settings.data()) {}

    VkStructureType sType = (VkStructureType)1000496000; // VK_STRUCTURE_TYPE_LAYER_SETTINGS_CREATE_INFO_EXT
    const void * pNext = nullptr;
    uint32_t settingCount;
    const LayerSettingEXT * pSettings;
};

} // namespace vk

#endif
