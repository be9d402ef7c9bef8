/* What both handlers need of XLA's FFI C API. Only this file knows its calling conventions. */
#ifndef CEEDTAP_XLA_FFI_H
#define CEEDTAP_XLA_FFI_H

#include <string.h>

#include "xla/ffi/api/c_api.h"

static inline XLA_FFI_Error *ct_ffi_error(const XLA_FFI_Api *api, XLA_FFI_Error_Code code, const char *message) {
  XLA_FFI_Error_Create_Args args = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, NULL, message, code};
  return api->XLA_FFI_Error_Create(&args);
}

/* XLA asks a handler for its API version once, at registration, by a call frame that carries this extension.
 * state_type: the type of the state that an instantiate handler makes, else NULL. Returns 1 when that was the call. */
static inline int ct_ffi_metadata(XLA_FFI_CallFrame *frame, const XLA_FFI_TypeId *state_type) {
  if (!frame->extension_start || frame->extension_start->type != XLA_FFI_Extension_Metadata) return 0;
  XLA_FFI_Metadata *metadata = ((XLA_FFI_Metadata_Extension *)frame->extension_start)->metadata;
  metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  metadata->api_version.minor_version = XLA_FFI_API_MINOR;
  metadata->traits = 0; /* never part of a command buffer: what we do is on the host */
  metadata->state_type_id.type_id = state_type ? state_type->type_id : 0;
  return 1;
}

/* The attribute `name` when it has this type, else NULL. */
static inline const void *ct_ffi_attr(const XLA_FFI_CallFrame *frame, const char *name, XLA_FFI_AttrType type) {
  for (int64_t i = 0; i < frame->attrs.size; i++) {
    const XLA_FFI_ByteSpan *span = frame->attrs.names[i];
    if (span->len == strlen(name) && !memcmp(span->ptr, name, span->len))
      return frame->attrs.types[i] == type ? frame->attrs.attrs[i] : NULL;
  }
  return NULL;
}

static inline int64_t ct_ffi_num_elements(const XLA_FFI_Buffer *buffer) {
  int64_t n = 1;
  for (int64_t i = 0; i < buffer->rank; i++) n *= buffer->dims[i];
  return n;
}

/* Bits of one element in a buffer on CPU, where XLA packs values of fewer than 8 bits, the first in the lowest bits;
 * 0: not data. */
static inline int ct_ffi_num_bits(XLA_FFI_DataType dtype) {
  switch (dtype) {
    case XLA_FFI_DataType_INVALID:
    case XLA_FFI_DataType_TOKEN:
      return 0;
    case XLA_FFI_DataType_S1:
    case XLA_FFI_DataType_U1:
      return 1;
    case XLA_FFI_DataType_S2:
    case XLA_FFI_DataType_U2:
      return 2;
    case XLA_FFI_DataType_S4:
    case XLA_FFI_DataType_U4:
    case XLA_FFI_DataType_F4E2M1FN:
      return 4;
    case XLA_FFI_DataType_S16:
    case XLA_FFI_DataType_U16:
    case XLA_FFI_DataType_F16:
    case XLA_FFI_DataType_BF16:
      return 16;
    case XLA_FFI_DataType_S32:
    case XLA_FFI_DataType_U32:
    case XLA_FFI_DataType_F32:
      return 32;
    case XLA_FFI_DataType_S64:
    case XLA_FFI_DataType_U64:
    case XLA_FFI_DataType_F64:
    case XLA_FFI_DataType_C64:
      return 64;
    case XLA_FFI_DataType_C128:
      return 128;
    default:
      return 8;
  }
}

/* Labels only: without them the data must arrive all the same. */
static inline void ct_ffi_ignore(const XLA_FFI_Api *api, XLA_FFI_Error *error) {
  if (!error) return;
  XLA_FFI_Error_Destroy_Args args = {XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, NULL, error};
  api->XLA_FFI_Error_Destroy(&args);
}

/* The local ordinal of the device that runs the program; -1: unknown. */
static inline int32_t ct_ffi_device(const XLA_FFI_CallFrame *frame) {
  XLA_FFI_DeviceOrdinal_Get_Args args = {XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE, NULL, frame->ctx, -1};
  ct_ffi_ignore(frame->api, frame->api->XLA_FFI_DeviceOrdinal_Get(&args));
  return args.device_ordinal;
}

static inline XLA_FFI_Error *ct_ffi_set_state(XLA_FFI_CallFrame *frame, XLA_FFI_TypeId *type, void *state) {
  XLA_FFI_State_Set_Args args = {XLA_FFI_State_Set_Args_STRUCT_SIZE, NULL,  frame->ctx,
                                 XLA_FFI_ExecutionStage_INSTANTIATE, type, state};
  return frame->api->XLA_FFI_State_Set(&args);
}

static inline XLA_FFI_Error *ct_ffi_get_state(XLA_FFI_CallFrame *frame, XLA_FFI_TypeId *type, void **state) {
  XLA_FFI_State_Get_Args args = {XLA_FFI_State_Get_Args_STRUCT_SIZE, NULL,  frame->ctx,
                                 XLA_FFI_ExecutionStage_INSTANTIATE, type, NULL};
  XLA_FFI_Error *error = frame->api->XLA_FFI_State_Get(&args);
  *state = args.state;
  return error;
}

#endif
