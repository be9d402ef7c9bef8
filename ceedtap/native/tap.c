/* The XLA FFI handler of a tap: copies the header that was made when the program was lowered, and the operands, into a
 * frame of the queue. Attribute `header`: u32 words of a header of version 2 (protocol.py). */
#include "ceedtap.h"
#include "queue.h"
#include "xla_ffi.h"

#include <stdio.h>
#include <stdlib.h>

enum { MAGIC_2 = 0x32544543, ALIGNMENT = 16 }; /* as in protocol.py */

static size_t aligned(size_t offset) { return (offset + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

/* The state of the handler is the consumer itself; an executable holds one reference to it for each tap. */
static void state_free(void *object) { ct_registry_unref(ct_consumers(), ((ct_consumer *)object)->id); }

static XLA_FFI_TypeId type_id = {0};
static XLA_FFI_TypeInfo type_info = {XLA_FFI_TypeInfo_STRUCT_SIZE, NULL, state_free};
void *ct_tap_type_id(void) { return &type_id; }
void *ct_tap_type_info(void) { return &type_info; }

static const XLA_FFI_Array *header_of(const XLA_FFI_CallFrame *frame) {
  const XLA_FFI_Array *header = ct_ffi_attr(frame, "header", XLA_FFI_AttrType_ARRAY);
  int valid = header && header->dtype == XLA_FFI_DataType_U32 && header->size >= 16;
  return valid && *(const uint32_t *)header->data == MAGIC_2 ? header : NULL;
}

static XLA_FFI_Error *bad_header(const XLA_FFI_CallFrame *frame) {
  return ct_ffi_error(frame->api, XLA_FFI_Error_Code_INVALID_ARGUMENT,
                      "ceedtap: a tap without a header of version 2; was this program made by another ceedtap?");
}

static XLA_FFI_Error *instantiate(XLA_FFI_CallFrame *frame) {
  if (ct_ffi_metadata(frame, &type_id)) return NULL;
  const XLA_FFI_Array *header = header_of(frame);
  if (!header) return bad_header(frame);
  const uint32_t *words = header->data;
  /* A program may be loaded before anybody has asked for its taps: then the consumer is made here. */
  ct_consumer *consumer = ct_consumer_get((uint64_t)words[1] << 32 | words[2]);
  if (!consumer) return ct_ffi_error(frame->api, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "ceedtap: out of memory");
  return ct_ffi_set_state(frame, &type_id, consumer);
}

/* Bytes of an operand in a frame, where each element takes at least one. */
static size_t num_bytes(const XLA_FFI_Buffer *arg) {
  int bits = ct_ffi_num_bits(arg->dtype);
  return (size_t)ct_ffi_num_elements(arg) * (bits < 8 ? bits > 0 : bits / 8);
}

static void copy(unsigned char *to, const XLA_FFI_Buffer *arg, size_t size) {
  int bits = ct_ffi_num_bits(arg->dtype);
  if (bits >= 8) {
    memcpy(to, arg->data, size);
    return;
  }
  const unsigned char *from = arg->data;
  for (size_t i = 0; i < size; i++) to[i] = from[i * bits / 8] >> (i * bits % 8) & ((1u << bits) - 1);
}

/* The device and the run are only labels: without them the data must arrive all the same. */
static void ignore(const XLA_FFI_Api *api, XLA_FFI_Error *error) {
  if (!error) return;
  XLA_FFI_Error_Destroy_Args args = {XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, NULL, error};
  api->XLA_FFI_Error_Destroy(&args);
}

static XLA_FFI_Error *timed_out(const XLA_FFI_CallFrame *frame) {
  char busy[192], text[512];
  ct_queue_busy(busy, sizeof busy);
  snprintf(text, sizeof text,
           "ceedtap: a tap waited for room in the outfeed until the time-out; %s. Make the consumer faster, give it a "
           "policy that drops events, or raise the limits with ceedtap.outfeed.configure.",
           busy);
  return ct_ffi_error(frame->api, XLA_FFI_Error_Code_DEADLINE_EXCEEDED, text);
}

static XLA_FFI_Error *execute(XLA_FFI_CallFrame *frame) {
  if (ct_ffi_metadata(frame, NULL)) return NULL;
  const XLA_FFI_Array *header = header_of(frame);
  if (!header) return bad_header(frame);
  size_t size = header->size * sizeof(uint32_t);
  for (int64_t i = 0; i < frame->args.size; i++) {
    const XLA_FFI_Buffer *arg = frame->args.args[i];
    if (arg->dtype != XLA_FFI_DataType_TOKEN) size = aligned(size) + num_bytes(arg);
  }
  void *consumer;
  XLA_FFI_Error *error = ct_ffi_get_state(frame, &type_id, &consumer);
  if (error) return error;
  XLA_FFI_RunId_Get_Args run = {XLA_FFI_RunId_Get_Args_STRUCT_SIZE, NULL, frame->ctx, 0};
  XLA_FFI_DeviceOrdinal_Get_Args device = {XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE, NULL, frame->ctx, -1};
  ignore(frame->api, frame->api->XLA_FFI_RunId_Get(&run));
  ignore(frame->api, frame->api->XLA_FFI_DeviceOrdinal_Get(&device));
  ct_frame *out;
  switch (ct_queue_reserve(consumer, device.device_ordinal, size, &out)) {
    case CT_RESERVED:
      break;
    case CT_SKIPPED:
      return NULL;
    case CT_TIMED_OUT:
      return timed_out(frame);
    default:
      return ct_ffi_error(frame->api, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED,
                          "ceedtap: no memory for the frame of a tap");
  }

  unsigned char *bytes = ct_frame_bytes(out);
  size_t end = header->size * sizeof(uint32_t);
  memcpy(bytes, header->data, end);
  for (int64_t i = 0; i < frame->args.size; i++) {
    const XLA_FFI_Buffer *arg = frame->args.args[i];
    if (arg->dtype == XLA_FFI_DataType_TOKEN) continue; /* of an ordered tap */
    size_t start = aligned(end);
    memset(bytes + end, 0, start - end);
    end = start + num_bytes(arg);
    if (end > start) copy(bytes + start, arg, end - start);
  }
  out->run_id = run.run_id;
  ct_queue_commit(out);
  return NULL;
}

void *ct_tap_instantiate_address(void) { return (void *)instantiate; }
void *ct_tap_execute_address(void) { return (void *)execute; }
