/* The XLA FFI handler of a tap: copies the header that was made when the program was lowered, and the operands, into a
 * frame of the queue (frame.h). */
#include "ceedtap.h"
#include "frame.h"
#include "queue.h"
#include "xla_ffi.h"

#include <stdio.h>
#include <stdlib.h>

/* The state of the handler is the consumer itself; an executable holds one reference to it for each tap. */
static void state_free(void *object) { ct_registry_unref(ct_consumers(), ((ct_consumer *)object)->id); }

static XLA_FFI_TypeId type_id = {0};
static XLA_FFI_TypeInfo type_info = {XLA_FFI_TypeInfo_STRUCT_SIZE, NULL, state_free};
void *ct_tap_type_id(void) { return &type_id; }
void *ct_tap_type_info(void) { return &type_info; }

static XLA_FFI_Error *bad_header(const XLA_FFI_CallFrame *frame) {
  return ct_ffi_error(frame->api, XLA_FFI_Error_Code_INVALID_ARGUMENT,
                      "ceedtap: a tap without a header of version 2; was this program made by another ceedtap?");
}

/* 0: out of memory. */
static int describe(const XLA_FFI_CallFrame *frame, ct_consumer *consumer) {
  const XLA_FFI_Array *description = ct_ffi_attr(frame, "description", XLA_FFI_AttrType_ARRAY);
  const XLA_FFI_Array *like = ct_ffi_attr(frame, "like", XLA_FFI_AttrType_ARRAY);
  if (!description || description->dtype != XLA_FFI_DataType_U8) return 1;
  int pairs = like && like->dtype == XLA_FFI_DataType_U32 ? (int)(like->size / 2) : 0;
  return ct_consumer_describe(consumer, description->data, description->size, pairs ? like->data : NULL, pairs);
}

static XLA_FFI_Error *instantiate(XLA_FFI_CallFrame *frame) {
  if (ct_ffi_metadata(frame, &type_id)) return NULL;
  const XLA_FFI_Array *header = ct_frame_header(frame);
  if (!header) return bad_header(frame);
  /* A program may be loaded before anybody has asked for its taps: then the consumer is made here. */
  ct_consumer *consumer = ct_consumer_get(ct_frame_id(header));
  if (!consumer || !describe(frame, consumer))
    return ct_ffi_error(frame->api, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "ceedtap: out of memory");
  return ct_ffi_set_state(frame, &type_id, consumer);
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

static int any_bit(const XLA_FFI_Buffer *buffer) {
  size_t size = ct_frame_num_bytes(buffer);
  const char *bytes = buffer->data;
  return size && (*bytes || memcmp(bytes, bytes + 1, size - 1)); /* not all bytes equal to a first one that is 0 */
}

static int int_attr(const XLA_FFI_CallFrame *frame, const char *name) {
  const XLA_FFI_Scalar *attr = ct_ffi_attr(frame, name, XLA_FFI_AttrType_SCALAR);
  return attr && attr->dtype == XLA_FFI_DataType_S32 ? *(const int32_t *)attr->value : 0;
}

/* Takes the number of the part of the program that runs, which comes before the conditions, off the frame; -1: there is
 * none, the program runs on one device. */
static int32_t take_part(XLA_FFI_CallFrame *frame) {
  if (!int_attr(frame, "numbered") || frame->args.size == 0) return -1;
  const XLA_FFI_Buffer *part = frame->args.args[--frame->args.size];
  return part->dtype == XLA_FFI_DataType_U32 ? *(const int32_t *)part->data : -1;
}

/* Takes the conditions, the last operands, off the frame: whether each of them has a value that is not 0. */
static int conditions_hold(XLA_FFI_CallFrame *frame) {
  int count = int_attr(frame, "conditions"), hold = 1;
  for (; count > 0 && frame->args.size > 0; count--) hold &= any_bit(frame->args.args[--frame->args.size]);
  return hold;
}

static XLA_FFI_Error *execute(XLA_FFI_CallFrame *frame) {
  if (ct_ffi_metadata(frame, NULL)) return NULL;
  const XLA_FFI_Array *header = ct_frame_header(frame);
  if (!header) return bad_header(frame);
  XLA_FFI_CallFrame rest = *frame; /* XLA's own stays as it is: it may be used for the next run */
  if (!conditions_hold(&rest)) return NULL;
  frame = &rest;
  int32_t part = take_part(frame);
  void *consumer;
  XLA_FFI_Error *error = ct_ffi_get_state(frame, &type_id, &consumer);
  if (error) return error;
  XLA_FFI_RunId_Get_Args run = {XLA_FFI_RunId_Get_Args_STRUCT_SIZE, NULL, frame->ctx, 0};
  ct_ffi_ignore(frame->api, frame->api->XLA_FFI_RunId_Get(&run));
  ct_frame *out;
  switch (ct_queue_reserve(consumer, ct_ffi_device(frame), ct_frame_size(frame, header), &out)) {
    case CT_RESERVED:
      break;
    case CT_SKIPPED:
      return NULL;
    case CT_TIMED_OUT:
      return timed_out(frame);
    case CT_INTERRUPTED:
      return ct_ffi_error(frame->api, XLA_FFI_Error_Code_CANCELLED,
                          "ceedtap: interrupted while a tap waited for room in the outfeed");
    default:
      return ct_ffi_error(frame->api, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED,
                          "ceedtap: no memory for the frame of a tap");
  }

  ct_frame_fill(ct_frame_bytes(out), frame, header);
  out->run_id = run.run_id;
  out->part = part;
  ct_queue_commit(out);
  return NULL;
}

void *ct_tap_instantiate_address(void) { return (void *)instantiate; }
void *ct_tap_execute_address(void) { return (void *)execute; }
