;; A handler made by hand, for guests that no compiler makes. The body of `handle` is put where BODY stands in braces.
(component
  (import "millstream:handler/types@0.1.0" (instance $types
    (type $m (record
      (field "id" u64) (field "stream" string) (field "group" string) (field "key" (option string))
      (field "rank" (option s64)) (field "routing-key" (option string)) (field "headers" (list (tuple string string)))
      (field "content-type" (option string)) (field "payload" (option (list u8))) (field "produced-at" u64)
      (field "attempt" u32) (field "max-attempts" u32) (field "timeout" u64) (field "replay" bool)
      (field "redriven" bool) (field "skipped" u32) (field "gap-since" (option u64))))
    (export "message" (type (eq $m)))
    (type $o (variant
      (case "done") (case "retry" string) (case "retry-after" (tuple u64 string)) (case "reject" string)
      (case "later" u64)))
    (export "outcome" (type (eq $o)))))
  (alias export $types "message" (type $message))
  (alias export $types "outcome" (type $outcome))
  (core module $module
    (memory (export "memory") 4)
    (global $top (mut i32) (i32.const 65536))
    ;; Only ever allocates, from 64 KiB on.
    (func (export "realloc") (param i32 i32 i32 i32) (result i32)
      (global.set $top (i32.and (i32.add (global.get $top) (i32.const 7)) (i32.const -8)))
      (global.get $top)
      (global.set $top (i32.add (global.get $top) (local.get 3))))
    (data (i32.const 528) "\03")
    (func (export "handle") (param $message i32) (result i32) {BODY}))
  (core instance $instance (instantiate $module))
  (func $handle (param "message" $message) (result $outcome)
    (canon lift (core func $instance "handle") (memory $instance "memory") (realloc (func $instance "realloc"))))
  (export "handle" (func $handle)))
