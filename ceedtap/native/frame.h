/* Frames made of a handler's operands: the header that came as attribute `header` when the program was lowered, u32
 * words of a header of version 2 (protocol.py), and the operands after it. */
#ifndef CEEDTAP_FRAME_H
#define CEEDTAP_FRAME_H

#include "xla_ffi.h"

enum { CT_MAGIC_2 = 0x32544543, CT_ALIGNMENT = 16 }; /* as in protocol.py */

/* The header, or NULL when there is none. */
static inline const XLA_FFI_Array *ct_frame_header(const XLA_FFI_CallFrame *frame) {
  const XLA_FFI_Array *header = ct_ffi_attr(frame, "header", XLA_FFI_AttrType_ARRAY);
  int valid = header && header->dtype == XLA_FFI_DataType_U32 && header->size >= 16;
  return valid && *(const uint32_t *)header->data == CT_MAGIC_2 ? header : NULL;
}

static inline uint64_t ct_frame_id(const XLA_FFI_Array *header) {
  const uint32_t *words = header->data;
  return (uint64_t)words[1] << 32 | words[2];
}

static inline size_t ct_frame_aligned(size_t offset) {
  return (offset + CT_ALIGNMENT - 1) / CT_ALIGNMENT * CT_ALIGNMENT;
}

/* Bytes of an array in a frame, where each element takes at least one. */
static inline size_t ct_frame_num_bytes(const XLA_FFI_Buffer *buffer) {
  int bits = ct_ffi_num_bits(buffer->dtype);
  return (size_t)ct_ffi_num_elements(buffer) * (bits < 8 ? bits > 0 : bits / 8);
}

static inline size_t ct_frame_size(const XLA_FFI_CallFrame *frame, const XLA_FFI_Array *header) {
  size_t size = header->size * sizeof(uint32_t);
  for (int64_t i = 0; i < frame->args.size; i++) {
    const XLA_FFI_Buffer *arg = frame->args.args[i];
    if (arg->dtype != XLA_FFI_DataType_TOKEN) size = ct_frame_aligned(size) + ct_frame_num_bytes(arg);
  }
  return size;
}

static inline void ct_frame_copy(unsigned char *to, const XLA_FFI_Buffer *arg, size_t size) {
  int bits = ct_ffi_num_bits(arg->dtype);
  if (bits >= 8) {
    memcpy(to, arg->data, size);
    return;
  }
  const unsigned char *from = arg->data;
  for (size_t i = 0; i < size; i++) to[i] = from[i * bits / 8] >> (i * bits % 8) & ((1u << bits) - 1);
}

static inline void ct_frame_fill(unsigned char *bytes, const XLA_FFI_CallFrame *frame, const XLA_FFI_Array *header) {
  size_t end = header->size * sizeof(uint32_t);
  memcpy(bytes, header->data, end);
  for (int64_t i = 0; i < frame->args.size; i++) {
    const XLA_FFI_Buffer *arg = frame->args.args[i];
    if (arg->dtype == XLA_FFI_DataType_TOKEN) continue; /* of an ordered effect */
    size_t start = ct_frame_aligned(end);
    memset(bytes + end, 0, start - end);
    end = start + ct_frame_num_bytes(arg);
    if (end > start) ct_frame_copy(bytes + start, arg, end - start);
  }
}

#endif
