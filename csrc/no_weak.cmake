# Run before linking, on the objects of csrc/kernel.cpp: cmake -DNM=... -P no_weak.cmake -- OBJECT...
#
# A weak symbol is one that several objects may define: an inline function, or a template's instance. The linker keeps one
# of them, and if that is the AVX-512 one, every CPU runs it. So a weak symbol of a unit for one instruction set has to have
# the namespace of that set in its name, which no other object has.
math(EXPR last "${CMAKE_ARGC} - 1")
set(is_object FALSE)
foreach(i RANGE ${last})
  set(argument "${CMAKE_ARGV${i}}")
  if(is_object)
    string(REGEX MATCH "kernel_([a-z0-9]+)\\.dir" _ "${argument}")
    set(isa "${CMAKE_MATCH_1}")
    string(LENGTH "${isa}" length)
    execute_process(
      COMMAND ${NM} --defined-only "${argument}"
      OUTPUT_VARIABLE symbols RESULT_VARIABLE failed ERROR_QUIET)
    string(REGEX MATCHALL "[^\n]* [WVu] [^\n]*" weak "${symbols}")
    list(FILTER weak EXCLUDE REGEX "9multihead${length}${isa}")
    if(weak AND NOT failed)
      list(JOIN weak "\n" weak)
      message(FATAL_ERROR "multihead: weak symbols in ${argument}, which another unit may define too:\n${weak}")
    endif()
  elseif(argument STREQUAL "--")
    set(is_object TRUE)
  endif()
endforeach()
