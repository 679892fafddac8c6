# Writes a header with the SHA-256 of the kernels' sources, so that what was built by other
# kernels is known as such: cmake -DFOLDER=<sources> -DOUTPUT=<header> -P source_hash.cmake
file(GLOB files ${FOLDER}/*.h ${FOLDER}/*.cpp)
list(SORT files)
set(all "")
foreach(file IN LISTS files)
  get_filename_component(name ${file} NAME)
  file(SHA256 ${file} hash)
  string(APPEND all "${name} ${hash}\n")
endforeach()
string(SHA256 hash "${all}")
file(WRITE ${OUTPUT} "#pragma once\n#define TRIMARAN_SOURCE_HASH \"${hash}\"\n")
